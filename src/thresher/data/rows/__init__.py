"""Row parsing: read rows of any known format as pairs of messages."""
