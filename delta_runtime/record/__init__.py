"""What the extension saw, in the vocabulary of `core`: events and the step graph."""
