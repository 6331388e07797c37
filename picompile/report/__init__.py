"""Pictures of profiles, predictors, artifacts and plans, on one page that works offline.

    sources = read_sources([Path("build/profile"), Path("build/predictors"), Path("build/artifact")])
    Path("report.html").write_text(render_report(sources), encoding="utf-8")

The figures of a profile are there without the page: `firing_curve`, `share_for` and `summarize`.
"""
