"""Text as rows and batches, checked, in an order that one number says."""
