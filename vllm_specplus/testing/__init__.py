"""Models and data that the project makes itself, for its tests, examples and demo."""
