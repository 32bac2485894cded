"""Which files the page consists of, by the path at which each is served. All of them are open."""

ENTRY = "/page/entry.json"
"""Says whether a key is needed at all; the page asks before it shows none, which a browser would log as an error."""
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/gateway.js": ("gateway.js", "text/javascript; charset=utf-8"),
    "/page/dom.js": ("dom.js", "text/javascript; charset=utf-8"),
    "/page/map.js": ("map.js", "text/javascript; charset=utf-8"),
    "/page/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/page/explain.js": ("explain.js", "text/javascript; charset=utf-8"),
}
