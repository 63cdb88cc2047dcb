"""The recipes and the model that come with Penstock: by name, and as copies."""

import re
import resource
from pathlib import Path

import pytest

from penstock import shipped
from penstock.config import ModelConfig, dump, load
from penstock.errors import ConfigError
from services.cli.app import main
from services.recipe import Recipe

ROOT = Path(__file__).parents[2]
TINY = ROOT / "models" / "tiny-qwen3-vl"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without recipes and models."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resolved(*recipes: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `penstock config` prints."""
    capsys.readouterr()
    assert main(["config", *recipes]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", list(shipped.recipes()))
def test_a_copy_means_the_same(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From any folder, and its model is found wherever the copy is."""
    assert main(["init", name]) == 0
    assert resolved(f"{name}.toml", capsys=capsys) == resolved(name, capsys=capsys)


def test_a_copy_names_itself_and_what_comes_with_penstock(elsewhere: Path) -> None:
    """Its commands are of the copy; its schema is beside it; other recipes are named without a path."""
    (elsewhere / "mine").mkdir()
    assert main(["init", "local-services", "mine/services.toml"]) == 0
    text = Path("mine/services.toml").read_text()
    assert "penstock serve router  --config tiny-cpu --config mine/services.toml" in text
    assert "recipes/" not in text
    assert text.startswith("#:schema ./recipe.schema.json\n")
    assert Path("mine/recipe.schema.json").read_text() == (ROOT / "recipes/recipe.schema.json").read_text()


@pytest.mark.parametrize("folder", [".", "..", "mine", ""])
def test_a_copy_goes_into_a_folder_that_is_given(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    """Under the recipe's name, with the schema beside it."""
    (elsewhere / "here" / "mine").mkdir(parents=True)
    monkeypatch.chdir(elsewhere / "here")
    assert main(["init", "tiny-cpu", folder]) == 0
    copy = Path(folder, "tiny-cpu.toml")
    assert copy.is_file()
    assert copy.with_name("recipe.schema.json").is_file()
    assert f"`penstock train {copy}`" in capsys.readouterr().out


def test_the_commands_of_a_copy_can_be_pasted_into_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    """Also with a space in its path: those that `penstock init` prints, and those in the copy."""
    assert main(["init", "tiny-cpu", "my recipe.toml"]) == 0
    said = capsys.readouterr().out
    assert said == (
        "my recipe.toml: edit it, then `penstock doctor 'my recipe.toml'` and `penstock train 'my recipe.toml'`\n"
    )
    assert re.search(r"^# +penstock train +'my recipe\.toml'", Path("my recipe.toml").read_text(), re.MULTILINE)


def test_all_but_two_are_whole_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    """`penstock init` says of each how it is run, by a line of its opening comment."""
    assert main(["init"]) == 0
    lines = capsys.readouterr().out.splitlines()
    uses = dict(zip(lines[::3], map(str.strip, lines[2::3]), strict=True))
    assert uses.keys() == shipped.recipes().keys()
    overlays = {name for name, use in uses.items() if not use.startswith(("penstock train", "penstock sft"))}
    assert overlays == {"cut-to-size", "local-services"}


def test_a_copy_overwrites_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a recipe nor another project's schema."""
    Path("recipe.schema.json").write_text("{}")
    assert main(["init", "tiny-cpu"]) == 0
    assert Path("recipe.schema.json").read_text() == "{}"
    Path("tiny-cpu.toml").write_text("# mine")
    assert main(["init", "tiny-cpu"]) == 2
    assert "error: tiny-cpu.toml exists already; give another name" in capsys.readouterr().err
    assert main(["init", "tiny-cpu", "no/such/folder.toml"]) == 2
    assert "error: no/such/folder.toml cannot be written: No such file or directory" in capsys.readouterr().err
    assert Path("tiny-cpu.toml").read_text() == "# mine"


def test_without_a_name_the_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with what it is for."""
    assert main(["init"]) == 0
    listed = capsys.readouterr().out
    assert "tiny-cpu\n    A complete run on two CPU cores in under ten minutes." in listed
    assert all(f"{name}\n    " in listed for name in shipped.recipes())


def test_each_recipe_names_the_command_that_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    """An overlay has none, and is not sent to doctor, which looks at what the command of a recipe asks."""
    main(["init"])
    blocks = capsys.readouterr().out.replace("\n    ", "\t").splitlines()
    uses = {name: (summary, use) for name, summary, use in (block.split("\t") for block in blocks)}
    assert uses["tiny-cpu"][1] == "penstock train tiny-cpu"
    assert uses["tiny-sft-cpu"][1] == "penstock sft tiny-sft-cpu"
    assert uses["local-services"][1].startswith("an overlay, no recipe of its own")
    assert all(summary.endswith(".") for summary, _ in uses.values())
    Path("mine").mkdir()
    for name, (_, use) in uses.items():
        assert main(["init", name, f"mine/{name}.toml"]) == 0
        said = capsys.readouterr().out
        if use.startswith("an overlay"):
            assert said == f"mine/{name}.toml: {use}\n"
            assert "doctor" not in said
        elif use.startswith("penstock sft"):
            assert f"`penstock doctor --sft mine/{name}.toml` and `penstock sft mine/{name}.toml`" in said
        else:
            assert f"`penstock doctor mine/{name}.toml` and `penstock train mine/{name}.toml`" in said


@pytest.mark.parametrize(("limit_bytes", "name"), [(100, "tiny-cpu.toml"), (50_000, "recipe.schema.json")])
def test_a_copy_that_cannot_be_written_whole_is_none(
    limit_bytes: int, name: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the recipe nor its schema is left, so that the same command works once there is room."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, usual[1]))
    try:
        assert main(["init", "tiny-cpu"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert capsys.readouterr().err.startswith(f"error: {name} cannot be written: File too large; ")
    assert not [*elsewhere.iterdir()]
    assert main(["init", "tiny-cpu"]) == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["init", "tiny-cpi"], "no recipe 'tiny-cpi' comes with Penstock; did you mean tiny-cpu"),
        (["config", "tiny-cpi"], "recipe tiny-cpi: there is no such file, and no such recipe .* did you mean tiny-cpu"),
        (["config", "recipes/tiny-cpu.toml"], "recipes/tiny-cpu.toml cannot be read: .*; `tiny-cpu` alone names the"),
        (["config", "mine.toml"], "recipe mine.toml cannot be read: No such file"),
        (["config", "qqqq"], "there are cut-to-size, .*, slime-geo3k-sft, tiny-cpu"),
        (
            ["config", "tiny-cpu", "--model.path=builtin:tiny"],
            "model.path = 'builtin:tiny': no model of this name comes",
        ),
    ],
)
def test_a_name_that_there_is_not_is_answered(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By one line with the remedy."""
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


def test_a_file_comes_before_the_name(elsewhere: Path) -> None:
    """Also one that is called like a recipe that comes with Penstock; a folder does not count."""
    Path("tiny-cpu").mkdir()
    assert shipped.find_recipe(Path("tiny-cpu")) == ROOT / "recipes/tiny-cpu.toml"
    Path("tiny-cpu").rmdir()
    Path("tiny-cpu").write_text("")
    assert shipped.find_recipe(Path("tiny-cpu")) == Path("tiny-cpu")


def test_a_run_keeps_the_name_of_a_model_that_comes_with_penstock(tmp_path: Path) -> None:
    """So its config.toml works in another installation; the path of any other model is kept as it was given."""
    given = load(Recipe, [], ["--model.path=builtin:tiny-qwen3-vl"])
    assert given.model is not None
    assert given.model.path == TINY
    assert 'path = "builtin:tiny-qwen3-vl"' in dump(given)
    assert Recipe.model_validate_json(given.model_dump_json()) == given
    assert 'path = "models/mine"' in dump(Recipe(model=ModelConfig(path=Path("models/mine"))))


def test_an_unknown_model_is_a_wrong_setting() -> None:
    """The error names the setting and the models that there are."""
    with pytest.raises(ConfigError, match=r"model\.path = 'builtin:x': .*there are tiny-qwen3-vl, tiny-qwen3-vl-zoom"):
        load(Recipe, [], ["--model.path=builtin:x"])
