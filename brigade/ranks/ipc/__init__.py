"""What the parent and the ranks both import: messages between them, and temporary directories."""
