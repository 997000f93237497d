"""Samples of images at computed places."""
