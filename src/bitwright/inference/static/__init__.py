"""Static scales from the user's prompts, and whether they fit others."""
