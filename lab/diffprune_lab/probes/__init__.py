"""The paper's probes as commands: each file asks one question of one backbone and one seed at a time.

A probe has `measure(bench, seed)`, which gives cells, `summarise(rows)`, which adds what follows from all seeds, and
`draw(rows, path)`, the figure, made from the rows alone. `store` merges the cells into `results/<name>.json`, so that a
run that was cut short goes on where it stopped. `bench` holds what probes share: pictures, classifier, trained scorers.
`scaling` asks vision-language models instead of classifiers, so it has a bench and files of its own.
"""
