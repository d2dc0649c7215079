"""Tests of what is written for, and run by, continuous integration."""
