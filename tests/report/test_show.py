"""A figure is shown and kept with the same bytes."""

from matplotlib.figure import Figure

from kdlab.report import show_figure


def test_the_file_and_the_display_are_one_picture(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **options: shown.append((data, options)))
    ax = Figure(figsize=(2, 1)).add_subplot()
    path = tmp_path / "new" / "10_budget_sweep.png"
    show_figure(ax, path, dpi=50)
    [(data, options)] = shown
    assert path.read_bytes() == data["image/png"]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert data["text/plain"] == options["metadata"]["image/png"]["alt"] == "10 budget sweep"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
