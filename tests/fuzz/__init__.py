"""A search for inputs that break a promise: seeded, as long as there is time, every case repeatable by its number."""
