"""Tests of the doctor. They share a made-up catalogue."""
