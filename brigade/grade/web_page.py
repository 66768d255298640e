"""A template for web pages that need no other file and no script, with a light and a dark mode."""

from __future__ import annotations

from html import escape

# Okabe and Ito's vermilion, lighter in dark mode, where it must stand out against black.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --strong: #b84a00; --soft: #f3f3f3; --mark: #ffe3c2; --quiet: #666; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --strong: #ff9d5c; --soft: #262626; --mark: #5a3200; --quiet: #aaa; }}
}}
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 0 auto; max-width: {width}; padding: 1rem; }}
pre, code {{ font: .85rem/1.4 ui-monospace, monospace; }}
pre {{ overflow-x: auto; white-space: pre-wrap; }}
{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def format_page(title: str, style: str, body: str, width: str = "50rem") -> str:
    """Return a page. `title` is escaped here; `body` is HTML, in which foreign text must already be escaped."""
    return PAGE.format(title=escape(title), style=style.lstrip(), body=body, width=width)
