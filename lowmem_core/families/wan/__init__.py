"""Wan 2.x text, image and video models."""
