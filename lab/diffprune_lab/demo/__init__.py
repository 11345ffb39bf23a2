"""The main job on the embedded model, from training to a page that shows what came out."""
