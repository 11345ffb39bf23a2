"""How the reference models are trained: one trainer (`trainer.py`), and what each family adds to it."""
