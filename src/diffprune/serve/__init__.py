"""A small OpenAI-compatible server of our own: for laptops, tests, and families that an engine lacks.

    HTTP (app, schema, pictures)  ->  Worker (one thread, one model)  ->  answer (a batch of rows)  ->  HTTP

Requests that wait are answered together, whatever their budgets, lengths and temperatures. `worker`, `rows` and
`answer` import nothing but the core; FastAPI and uvicorn are the extra `serve`.
"""

from pathlib import Path

LOOK = Path(__file__).parent / "page" / "look.css"  # colours, type and cards, for other pages too
