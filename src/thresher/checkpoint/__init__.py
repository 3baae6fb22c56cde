"""Checkpoints: written atomically, verified by digest, resumable on any mesh, and free of pickles."""
