#!/usr/bin/env bash
# The first hour of three users, end to end: an engineer with a checkpoint folder, a researcher with captions, a curious
# person with the demo. As it stands it runs in minutes on two cores, on a tiny model with random weights, so its answers
# say nothing; with CHECKPOINT=folder, FAMILY=its model_type and PHOTOS=folder (pictures and a
# metadata.jsonl of captions) it is about your own.
#
#     examples/first_hour.sh [OUT]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-out/first_hour}
python=${PYTHON:-python}
read -r -a diffprune <<< "${DIFFPRUNE:-diffprune}"
mkdir -p "$out"

say() { printf '\n== %s\n' "$*"; }

if [ -z "${CHECKPOINT:-}" ]; then
  CHECKPOINT=$out/checkpoint
  say "a tiny checkpoint in $CHECKPOINT, saved by the stock classes"
  "$python" - "$CHECKPOINT" << 'PY'
import sys

import torch
from transformers import AutoModelForImageTextToText

from diffprune.shapes import SHAPES

config, processor = SHAPES["llava-1.5-7b"](True)
torch.manual_seed(0)
AutoModelForImageTextToText.from_config(config).save_pretrained(sys.argv[1])
processor.save_pretrained(sys.argv[1])
PY
fi
if [ -z "${PHOTOS:-}" ]; then
  PHOTOS=$out/photos
  mkdir -p "$PHOTOS"
  "$python" - "$PHOTOS" << 'PY'
import json
import sys
from pathlib import Path

from PIL import Image

folder, lines = Path(sys.argv[1]), []
for number, color in enumerate(("red", "green", "blue", "yellow") * 3):
    Image.new("RGB", (96, 96), color).save(folder / f"{number}.png")
    lines.append(json.dumps({"image": f"{number}.png", "caption": f"The picture is {color}."}))
(folder / "metadata.jsonl").write_text("\n".join(lines))
PY
fi

say "the engineer: what is here, a question, a folder of pictures, the same command again"
"${diffprune[@]}" doctor
"${diffprune[@]}" ask --model "$CHECKPOINT" --method divprune --keep 64 --image "$here/wolf.png" --max-new-tokens 4 \
  "Which word does the sign show?"
for _ in 1 2; do
  "${diffprune[@]}" ask "$PHOTOS" --question "What is it?" --out "$out/answers.jsonl" --model "$CHECKPOINT" \
    --method divprune --keep 64 --max-new-tokens 4
done
"${diffprune[@]}" plan --backbone llava-1.5-7b --keep 64 --gpu h200

say "the researcher: a scorer trained on captions, asked and looked at"
cat > "$out/captions.yaml" << YAML
backbone: {name: ${FAMILY:-llava}, weights: $(cd "$CHECKPOINT" && pwd), dtype: float32}
method:   {name: diffprune}
budget:   {keep: 16}
optim:    {steps: 4, batch_size: 4, accumulate: 1}
tau:      {anneal_steps: 2}
data:     {name: $(cd "$PHOTOS" && pwd), validation: 4}
YAML
"${diffprune[@]}" train --config "$out/captions.yaml" --out "$out/scorer"
"${diffprune[@]}" ask --pruner "$out/scorer" --image "$here/wolf.png" --keep 16 --max-new-tokens 4 "What is it?"
"${diffprune[@]}" show --pruner "$out/scorer" --image "$here/wolf.png" --keep 16 --out "$out/kept.png"

say "the curious: the demo, and a chat"
"${diffprune[@]}" demo --quick --out "$out/demo"
"$python" "$here/5_chat.py"

say "done: $out holds answers.jsonl, scorer, kept.png and demo/index.html"
