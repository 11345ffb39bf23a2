"""Makes lab/diffprune_lab/assets/glyphs.png: 36 upper-case letters and digits, 10 x 16 pixels each, in one row.

The glyphs are DejaVu Sans Mono Bold, taken from the font file inside matplotlib. DejaVu fonts are free to use, change
and redistribute (Bitstream Vera licence; the changes by the DejaVu project are in the public domain); matplotlib
carries the text as `LICENSE_DEJAVU`. The picture is committed because font rendering differs between versions of
FreeType, and the pixels of a scene must not.

    python runs/make_glyph_atlas.py
"""

from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

GLYPHS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
WIDTH, HEIGHT = 10, 16
FONT_SIZE = 16  # the largest whose every letter fits into 10 x 16 with a free column
TARGET = Path(__file__).parents[1] / "lab/diffprune_lab/assets/glyphs.png"


def draw_glyphs() -> Image.Image:
    """All glyphs in a row, white on black, standing on a common line, centred in their cells."""
    file = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSansMono-Bold.ttf"
    font = ImageFont.truetype(str(file), FONT_SIZE)
    sheet = Image.new("L", (WIDTH * len(GLYPHS), HEIGHT), 0)
    for place, glyph in enumerate(GLYPHS):
        cell = Image.new("L", (WIDTH, HEIGHT), 0)
        ImageDraw.Draw(cell).text((WIDTH / 2, HEIGHT - 2), glyph, fill=255, font=font, anchor="ms")
        sheet.paste(cell, (place * WIDTH, 0))
    return sheet


if __name__ == "__main__":
    draw_glyphs().save(TARGET, optimize=True)
    print(f"wrote {TARGET.name}, {TARGET.stat().st_size} bytes")
