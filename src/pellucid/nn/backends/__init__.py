"""The kernels behind ``attend``: one slow and readable, the others equal to it in a test."""
