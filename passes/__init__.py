"""The compiler half: values and pure functions over FX graphs. Imports torch and itself only."""
