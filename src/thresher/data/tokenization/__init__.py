"""Chat templates, tokenization and truncation."""
