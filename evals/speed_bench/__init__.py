"""SPEED-Bench: reading it, filling in its placeholders, playing its conversations."""
