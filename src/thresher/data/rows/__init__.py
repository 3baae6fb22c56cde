"""Row formats: from a row of any known format to a pair of messages."""
