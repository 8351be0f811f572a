"""What a forward pass runs in: autocast, and islands in fp32 by rule and by name."""
