"""Pictures to try on the page: one that ships, and questions of the sources that installed packages bring."""

import base64
import io
import logging
from pathlib import Path
from typing import Any

from PIL import Image

from diffprune.evaluate.sources import task_sources

logger = logging.getLogger("diffprune")

SHIPPED = Path(__file__).parent / "page" / "example.png"
MOST = 5  # of the installed sources


def find_examples(vlm: Any) -> list[dict[str, str]]:
    """Name, picture (a data URI) and question of each example."""
    found = [{"name": "a sign", "image": as_uri(Image.open(SHIPPED)), "question": "Which word does the sign show?"}]
    for source in task_sources().values():
        if len(found) > MOST:
            break
        try:
            asked = source.build(source.names()[:MOST], count=1).for_model(vlm)
            for task in asked.tasks:
                one = next((question for question in task.questions if len(question.images) == 1), None)
                if one is not None and not one.turns and len(found) <= MOST:
                    (picture,) = asked.open(one.images)
                    found.append({"name": task.name, "image": as_uri(picture), "question": one.prompt})
        except Exception as error:  # whatever another package does wrong
            logger.warning("examples of %s are left out: %s", type(source).__name__, error)
    return found


def as_uri(picture: Image.Image) -> str:
    """The picture itself as an address."""
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
