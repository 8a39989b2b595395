"""Sets that are made, not found: ListOps, Pathfinder, Path-X and associative recall."""
