"""What `thresher demo` makes itself: a small world of facts, a model that speaks about it, and preference pairs."""
