"""Passes that insert what an option of the program asks for."""
