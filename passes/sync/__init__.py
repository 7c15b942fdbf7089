"""Synchronization between ranks: inference and verification."""
