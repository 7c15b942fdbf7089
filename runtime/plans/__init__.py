"""Plans: steps in streams, and the synchronization that their copies need."""
