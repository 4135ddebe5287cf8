"""The figures of the YOSO papers, a module each.

A module has TITLE, `measure(settings)`, which gives what is stored as JSON and the arrays that only
the picture needs, `table(results)` in Markdown and `draw(results, arrays)`, a matplotlib figure.
"""
