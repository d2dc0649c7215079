"""Tests of the vocabulary of trainings, without the stack."""
