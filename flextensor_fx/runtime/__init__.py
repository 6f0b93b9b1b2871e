"""The engine: everything that is there at run time only, and all state that changes."""
