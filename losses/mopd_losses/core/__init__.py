"""The loss interface, student rows and the block-wise head."""
