"""A figure is shown and kept with the same bytes."""

from matplotlib.figure import Figure

from kdlab.report import show_figure


def test_the_file_and_the_display_are_one_picture(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **options: shown.append((data, options)))
    ax = Figure(figsize=(2, 1)).add_subplot()
    ax.set_title(" ", loc="left")
    path = tmp_path / "new" / "10_budget_sweep.png"
    show_figure(ax, path, dpi=50)
    [(data, options)] = shown
    assert path.read_bytes() == data["image/png"]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert data["text/plain"] == options["metadata"]["image/png"]["alt"] == "10 budget sweep"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_words_for_a_picture_are_its_title(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, metadata, **_: shown.append((data, metadata)))
    figure = Figure(figsize=(2, 1))
    ax = figure.add_subplot(121)
    figure.add_subplot(122).set_title("second")
    show_figure(ax, tmp_path / "a.png", dpi=30)
    ax.set_title("Tokens per round\nby budget", loc="left")
    show_figure(ax, tmp_path / "a.png", dpi=30)
    figure.legend(ax.plot([0, 1]), ["a line"], title="Above both")
    show_figure(figure, tmp_path / "a.png", dpi=30)
    figure.suptitle("Both")
    show_figure(figure, tmp_path / "a.png", dpi=30)
    words = ["second", "Tokens per round by budget", "Above both", "Both"]
    assert [data["text/plain"] for data, _ in shown] == words
    assert [metadata["image/png"]["alt"] for _, metadata in shown] == [data["text/plain"] for data, _ in shown]
