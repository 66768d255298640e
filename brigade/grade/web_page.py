"""A template for web pages that need no other file and no script, with a light and a dark mode."""

from __future__ import annotations

from html import escape

# Okabe and Ito's vermilion and green, lighter in dark mode, where they must stand out against black.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --strong: #b84a00; --good: #00734f; }}
:root {{ --soft: #f3f3f3; --mark: #ffe3c2; --quiet: #666; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --strong: #ff9d5c; --good: #4cc79f; --soft: #262626; --mark: #5a3200; --quiet: #aaa; }}
}}
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 0 auto; max-width: {width}; padding: 1rem; }}
pre, code {{ font: .85rem/1.4 ui-monospace, monospace; }}
pre {{ overflow-x: auto; white-space: pre-wrap; background: var(--soft); border-radius: 4px; padding: .5rem; }}
h1 {{ font-size: 1.5rem; }}
h2 {{ font-size: 1.1rem; border-bottom: 1px solid var(--soft); padding-bottom: .3rem; }}
table {{ border-collapse: collapse; }}
th, td {{ border-bottom: 1px solid var(--soft); padding: .3rem 1.2rem .3rem 0; text-align: left; }}
a {{ color: var(--strong); }}
@media (max-width: 40rem) {{ th, td {{ padding-right: .5rem; font-size: .8rem; }} td {{ overflow-wrap: anywhere; }} }}
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
