"""What composes with a loss: each file is one modifier, pure, and knows no loss."""
