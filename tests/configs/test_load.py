"""Reading stacks: what is right gives settings, what is wrong gives messages that a person can act on."""

import math
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from kvcascade.configs import StackSettings, document, load_stack, parse_stack, registry, resolved
from kvcascade.configs.load import shipped
from kvcascade.errors import ConfigError

THIRD_PARTY = Path(__file__).parents[1] / "thirdparty"
HOST = {"type": "host", "capacity": "1GiB"}


@pytest.fixture(autouse=True)
def third_party(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs the package of a third party, with a tier type `acme`."""
    monkeypatch.syspath_prepend(THIRD_PARTY)
    registry.known.cache_clear()
    yield
    registry.known.cache_clear()


def types() -> str:
    return ", ".join(sorted(registry.known(registry.TIERS)))


def message(data: Any, source: str = "stack.yaml") -> str:
    with pytest.raises(ConfigError) as caught:
        parse_stack(dedent(data) if isinstance(data, str) else data, source)
    return str(caught.value)


def acme(**settings: Any) -> dict[str, Any]:
    return {"version": 1, "tiers": [HOST, {"type": "acme", "shelf": "/shelf", **settings}]}


TEN_MISTAKES = {
    "a key with a slip": (
        """\
        version: 1
        tiers:
          - type: host
            capcity: 8GiB
        """,
        "stack.yaml:3: tiers[0].capacity: required, but missing\n"
        "stack.yaml:4: tiers[0].capcity: unknown key (did you mean 'capacity'?); allowed: type, name, capacity, "
        "eviction, watermarks, staging, pin, hugepages",
    ),
    "a unit with a slip": (
        """\
        version: 1
        tiers:
          - type: host
            capacity: 8gib
        """,
        "stack.yaml:4: tiers[0].capacity: '8gib': unknown unit 'gib' (did you mean GiB?); "
        "allowed: KiB, MiB, GiB, TiB, PiB, B, KB, MB, GB, TB, PB",
    ),
    "a tier type that is not installed": (
        """\
        version: 1
        tiers:
          - type: host
            capacity: 8GiB
          - type: memori
        """,
        "stack.yaml:5: tiers[1].type: unknown tier type 'memori' (did you mean 'memory'?); allowed: {types}. "
        "If another package brings it, install that package here with pip (it declares it as an entry point of "
        "'kvcascade.tiers')",
    ),
    "an environment variable that is not set": (
        """\
        version: 1
        tiers:
          - type: host
            capacity: ${KVCASCADE_NOT_SET}
        """,
        "stack.yaml:4: tiers[0].capacity: the environment variable KVCASCADE_NOT_SET is not set; set it, or give "
        "a default: ${KVCASCADE_NOT_SET:-default}",
    ),
    "a secret": (
        """\
        version: 1
        tiers:
          - type: host
            capacity: 8GiB
          - type: acme
            shelf: /shelf
            password: hunter2
        """,
        "stack.yaml:7: tiers[1].password: a secret must not stand in a stack; take it from the environment, "
        "password: ${NAME}, or from a file",
    ),
    "a key given twice": (
        """\
        version: 1
        tiers:
          - type: host
            capacity: 8GiB
            capacity: 9GiB
        """,
        "stack.yaml:5: tiers[0].capacity: also given in line 4",
    ),
    "no host tier": (
        """\
        version: 1
        tiers:
          - type: acme
            shelf: /shelf
        """,
        "stack.yaml:3: tiers[0].type: 'acme' can't be the first tier; that is of type 'host'",
    ),
    "two tiers on one place": (
        """\
        version: 1
        tiers:
          - type: host
            capacity: 8GiB
          - type: acme
            name: one
            shelf: /shelf
          - type: acme
            name: two
            shelf: /shelf
        """,
        "stack.yaml:8: tiers[2]: uses the shelf /shelf, as tiers[1] does; each needs its own",
    ),
    "a tier that receives what nobody chooses to evict": (
        """\
        version: 1
        tiers:
          - type: host
            capacity: 8GiB
          - type: fs
            path: /mnt/kvcascade
          - type: acme
            shelf: /shelf
            write: on_evict
        """,
        "stack.yaml:9: tiers[2].write: 'on_evict' is allowed only directly below a tier whose eviction is ours; "
        "tiers[1] of type 'fs' makes room by itself",
    ),
    "a setting that is not served yet": (
        """\
        version: 1
        tiers:
          - type: host
            capacity: 8GiB
            hugepages: true
        """,
        "stack.yaml:5: tiers[0].hugepages: true: not served yet by this version; the pool uses pages of the usual "
        "size",
    ),
    "a word that is not a choice": (
        """\
        version: 1
        reset_scope: primry
        tiers:
          - type: host
            capacity: 8GiB
        """,
        "stack.yaml:2: reset_scope: 'primry': expected 'all' or 'primary' (did you mean 'primary'?)",
    ),
}


@pytest.mark.parametrize("loader", [yaml.SafeLoader, document._LOADER])
@pytest.mark.parametrize("name", TEN_MISTAKES)
def test_one_mistake_gets_a_message_to_act_on(name: str, loader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache/LMCache#1244, LMCache/LMCache#2854: no slip is ignored; each gets file, line, key and way out."""
    monkeypatch.setattr(document, "_LOADER", loader)
    text, expected = TEN_MISTAKES[name]
    assert message(text) == expected.replace("{types}", types())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"shelves": "3"}, "tiers[1].shelves: '3': expected a whole number"),
        ({"shelves": True}, "tiers[1].shelves: true: expected a whole number"),
        ({"shelves": None}, "tiers[1].shelves: null: expected a whole number"),
        ({"shelves": 1.5}, "tiers[1].shelves: 1.5: expected a whole number"),
        ({"shelves": {"a": 1}}, "tiers[1].shelves: a mapping: expected a whole number"),
        ({"shelves": 0}, "tiers[1].shelves: 0: expected at least 1"),
        ({"shelves": 10}, "tiers[1].shelves: 10: expected at most 9"),
        ({"url": 7}, "tiers[1].url: 7: expected text; put it in quotes"),
        ({"nodes": "a"}, "tiers[1].nodes: 'a': expected a list"),
        ({"nodes": ["a", 2]}, "tiers[1].nodes[1]: 2: expected text; put it in quotes"),
        ({"queue": 2}, "tiers[1].queue: 2: expected at most 1"),
        ({"queue": True}, "tiers[1].queue: true: expected a number"),
        ({"queue": math.nan}, "tiers[1].queue: nan: expected a finite number"),
        ({"fill": "yes"}, "tiers[1].fill: 'yes': expected true or false"),
        ({"promote": "sometimes"}, "tiers[1].promote: 'sometimes': expected 'always' or 'never' or a mapping"),
        ({"promote": {"after": 0}}, "tiers[1].promote.after: 0: expected at least 1"),
        (
            {"promote": {"aftr": 2}},
            "tiers[1].promote.after: required, but missing\n"
            "tiers[1].promote.aftr: unknown key (did you mean 'after'?); allowed: after",
        ),
        ({"breaker": 5}, "tiers[1].breaker: 5: expected a mapping"),
        (
            {"breaker": {"failure": 5}},
            "tiers[1].breaker.failure: unknown key (did you mean 'failures'?); allowed: failures, probe_every",
        ),
        (
            {"name": "a b"},
            "tiers[1].name: 'a b': expected 1 to 63 letters, digits, '_', '-' or '.', the first a letter or digit",
        ),
        ({"deadline": 5}, "tiers[1].deadline: 5 has no unit; allowed: us, ms, s, m, h, d"),
        ({"deadline": "0s"}, "tiers[1].deadline: '0s': expected more than 0"),
        ({"url": b"x"}, "tiers[1].url: expected text, a number, true, false, a list or a mapping, not bytes"),
        ({"url": "x" * 200}, None),
        ({"shelves": 10**5000}, "tiers[1].shelves: expected a number of less than 64 bits"),
        ({"ttl": "0s"}, "tiers[1].ttl: '0s': expected more than 0"),
        ({"admit_after": 0}, "tiers[1].admit_after: 0: expected at least 1"),
    ],
)
def test_a_value_that_does_not_fit_is_shown_with_what_does(settings: dict[str, Any], expected: str | None) -> None:
    if expected is None:
        parse_stack(acme(**settings))
    else:
        assert message(acme(**settings), "x") == "\n".join(f"x: {line}" for line in expected.splitlines())


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        ({}, "tiers[1].type: required, but missing; allowed: {types}"),
        ({"type": 5}, "tiers[1].type: 5: expected text; allowed: {types}"),
        ("acme", "tiers[1]: 'acme': expected a mapping, beginning with: type: ..."),
        (
            {"type": "acme_odd"},
            "tiers[1].type: 'acme_odd' is declared by acme_tier:TENANTS, which is no settings class of a tier",
        ),
        (
            {"type": "acme_gone"},
            "tiers[1].type: 'acme_gone' is declared by the package acme-tier but can't be imported: No module "
            "named 'acme_driver_that_is_not_there'. Reinstall it with: pip install --force-reinstall acme-tier",
        ),
        ({"type": "host", "name": "second", "capacity": 4096}, "tiers[1].type: 'host' can only be the first tier"),
        ({"type": "memory", "name": "host"}, "tiers[1].name: 'host' is the name of tiers[0]; give another one"),
        (
            {"type": "acme", "shelf": "/s", "eviction": "lru"},
            "tiers[1].eviction: evicts nothing without a capacity; give one, or leave eviction out",
        ),
    ],
)
def test_a_tier_that_can_not_stand_there_is_refused(tier: Any, expected: str) -> None:
    data = {"version": 1, "tiers": [HOST, tier]}
    assert message(data, "x") == "x: " + expected.replace("{types}", types())


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ({"capacity": 0}, "capacity: 0: expected more than 0"),
        ({"capacity": -1}, "capacity: -1: expected a size such as 512MiB, 8GiB or 5GB; finite, not negative"),
        ({"capacity": ""}, "capacity: '': expected a size such as 512MiB, 8GiB or 5GB"),
        ({"capacity": None}, "capacity: null: expected a size such as 512MiB, 8GiB or 5GB"),
        ({"capacity": "abc"}, "capacity: 'abc': expected a size such as 512MiB, 8GiB or 5GB"),
        ({"capacity": True}, "capacity: true: expected a size such as 512MiB, 8GiB or 5GB"),
        (
            {"capacity": math.nan},
            "capacity: nan: expected a size such as 512MiB, 8GiB or 5GB; finite, not negative",
        ),
        ({"capacity": 4096, "pin": 3}, "pin: 3: expected 'auto' or true or false"),
        (
            {"capacity": 4096, "pin": True},
            "pin: true: not served yet by this version; memory is page-locked by the worker of an engine",
        ),
        (
            {"capacity": 4096, "watermarks": {"high": 0.5, "low": 0.8}},
            "watermarks: low (0.8) must be less than high (0.5)",
        ),
        (
            {"capacity": 4096, "eviction": "lruu"},
            "eviction: unknown eviction policy 'lruu' (did you mean 'lru'?); allowed: {policies}. If another "
            "package brings it, install that package here with pip (it declares it as an entry point of "
            "'kvcascade.eviction')",
        ),
    ],
)
def test_a_host_tier_that_is_not_one(host: dict[str, Any], expected: str) -> None:
    """LMCache/LMCache#1244: a size of zero, in words, or none at all is an error, never a crash later."""
    policies = ", ".join(sorted(registry.known(registry.EVICTION)))
    data = {"version": 1, "tiers": [{"type": "host", **host}]}
    assert message(data, "x") == "x: tiers[0]." + expected.replace("{policies}", policies)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "s: is empty; a stack begins with: version: 1"),
        ("# nothing\n", "s: is empty; a stack begins with: version: 1"),
        ("- a\n", "s:1: is not a mapping; a stack begins with: version: 1"),
        ("tiers", "s:1: is not a mapping; a stack begins with: version: 1"),
        ("version: 1\n", "s:1: tiers: required, but missing"),
        (
            "version: 1\ntiers: []\n",
            "s:2: tiers: an empty list: expected a list of one tier or more, the first of type host",
        ),
        (
            "version: 1\ntiers: host\n",
            "s:2: tiers: 'host': expected a list of one tier or more, the first of type host",
        ),
        ("version: 1\ntiers:\n", "s:2: tiers: null: expected a list of one tier or more, the first of type host"),
        ("tiers:\n\t- type: host\n", "s:2: a tab: YAML is indented with spaces"),
        ("version: 1\n---\nversion: 1\n", "s:2: a second document (---); a file holds one stack"),
        ("version: 1\n'\n", "s:3: not YAML: while scanning a quoted scalar, found unexpected end of stream"),
        ("a: \x00", "s:1: not YAML: it holds characters that YAML does not allow"),
        ("[" * 100_000, None),
        ("a: b: c\n", "s:1: not YAML: mapping values are not allowed in this context"),
    ],
)
def test_what_is_no_stack_at_all(text: str, expected: str | None) -> None:
    found = message(text, "s")
    assert expected is None or found == expected


@pytest.mark.parametrize("version", ["2", "0", "'1'", "one", "1.5", "true", "null"])
def test_another_version_of_the_format_is_refused(version: str) -> None:
    found = message(f"version: {version}\ntiers:\n  - type: host\n    capacity: 8GiB\n", "s")
    assert found == f"s:1: version: {version if version != 'one' else repr(version)}: this release reads version 1"


def test_aliases_and_tags_are_refused_and_never_shown() -> None:
    text = """\
        version: 1
        namespace: !!python/object:os.system hunter2
        tiers: &tiers
          - type: host
            capacity: 8GiB
          - *tiers
        """
    assert message(text) == (
        "stack.yaml:2: namespace: a tag (!name) can't be used here; put a text that begins with ! in quotes\n"
        "stack.yaml:3: tiers[1]: an alias (*name) can't be used here; write the value out"
    )
    assert message("namespace: *hunter2\n") == (
        "stack.yaml:1: an alias (*name) can't be used here; put a text that begins with * in quotes"
    )


def test_all_problems_come_together_in_the_order_of_the_file() -> None:
    text = """\
        nmespace: x
        version: 1
        log_every: often
        tiers:
          - type: host
            capacity: 8
            capacity: 9
            staging: 1mib
          - type: memory
            name: host
            queue: 0
          - type: nothing-like-it
        """
    lines = message(text).splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["stack.yaml:1", "nmespace"],
        ["stack.yaml:3", "log_every"],
        ["stack.yaml:7", "tiers[0].capacity"],
        ["stack.yaml:8", "tiers[0].staging"],
        ["stack.yaml:11", "tiers[1].queue"],
        ["stack.yaml:12", "tiers[2].type"],
    ]


def test_a_key_is_unknown_also_where_it_is_strange() -> None:
    found = message(acme(tiers=None, **{"a\nb": 1, "": 2}), "x").splitlines()
    assert [re.split(r"[;(]", line)[0].rstrip() for line in found] == [
        "x: tiers[1].'': unknown key",
        r"x: tiers[1].'a\nb': unknown key",
        "x: tiers[1].tiers: unknown key",
    ]


def test_required_keys_that_are_missing_are_all_listed() -> None:
    """llm-d/llm-d-kv-cache#499: no backend gets to stumble over what was not given."""
    data = {"version": 1, "tiers": [{"type": "host"}, {"type": "acme"}]}
    assert message(data, "x") == (
        "x: tiers[0].capacity: required, but missing\nx: tiers[1].shelf: required, but missing"
    )


# --- files


def test_a_file_is_read_and_named_in_messages(tmp_path: Path) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text("\ufeffversion: 1\ntiers:\n  - type: host\n    capacity: 5GiB\n")
    assert load_stack(path).primary.capacity == 5 << 30
    path.write_text("version: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_stack(str(path))
    assert str(caught.value) == f"{path}:1: tiers: required, but missing"


def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("version: 1\n# größer\n".encode("latin-1"))
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (1 << 20) + b"\n")
    expected = {
        tmp_path: f"{tmp_path}: can't be read: Is a directory",
        latin: f"{latin}:2: not UTF-8 text",
        large: f"{large}: larger than 1 MiB; that is not a stack",
        tmp_path / "latn.yaml": (
            f"{tmp_path}/latn.yaml: no such file (did you mean '{latin}'?); "
            f"shipped stacks: embedded, full, host-only, host-redis, minio, shared-fs"
        ),
        latin / "x": f"{latin}/x: can't be read: Not a directory",
        "embeded": (
            "embeded: no such file (did you mean 'embedded'?); "
            "shipped stacks: embedded, full, host-only, host-redis, minio, shared-fs"
        ),
        "a\0b": "a\0b: can't be read: embedded null byte",
    }
    for path, text in expected.items():
        with pytest.raises(ConfigError) as caught:
            load_stack(path)
        assert str(caught.value) == text


def test_shipped_stacks_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a file or folder of that name stands in the way."""
    (tmp_path / "host-only").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVCASCADE_HOST", "3GiB")
    assert load_stack("host-only").primary.capacity == 3 << 30
    assert set(shipped()) == {"embedded", "full", "host-only", "host-redis", "minio", "shared-fs"}


@pytest.mark.parametrize("name", sorted(shipped()))
def test_shipped_stacks_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCASCADE_S3_BUCKET", "kv-cache")
    assert len(load_stack(name).tiers) >= 1


def test_the_full_stack_says_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, but for addresses, sizes and what is the environment's to say."""
    monkeypatch.setenv("KVCASCADE_S3_BUCKET", "kv-cache")
    given = {"name", "capacity", "path", "url", "bucket", "region"}
    for tier in load_stack("full").tiers:
        fields = type(tier).model_fields
        said = {name: getattr(tier, name) for name in tier.model_fields_set - given - {"type"}}
        assert said == {name: fields[name].get_default(call_default_factory=True) for name in said}


# --- ${}


@pytest.mark.parametrize(
    ("written", "value"),
    [("${N}", "4"), ('"${N}"', "4"), ("'${N}'", "4"), ("${M:-4}", None), ("${EMPTY:-4}", "")],
)
def test_a_whole_scalar_is_typed_as_yaml_would(
    written: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("N", "EMPTY"):
        monkeypatch.setenv(name, value or "")
    text = f"version: 1\ntiers:\n- type: host\n  capacity: 1GiB\n- type: memory\n  concurrency: {written}\n"
    assert parse_stack(text).secondary[0].concurrency == 4


@pytest.mark.parametrize(
    "value", ["12345", "true", "null", "1.5", "", "0x10", "[a, b]", "{a: b}", "a: b # c", "*a", "${N}"]
)
def test_where_text_is_wanted_a_variable_is_text(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEXT", value)
    data = acme(url="${TEXT}", nodes=["${TEXT}", "a-${TEXT}"], password="${TEXT}") | {"namespace": "${TEXT}"}
    stack = parse_stack(data)
    tier: Any = stack.secondary[0]
    assert stack.namespace == tier.url == value
    assert tier.nodes == (value, f"a-{value}")
    assert (tier.password.get_secret_value() if tier.password else "") in (value, "")
    assert parse_stack(yaml.safe_dump(data)) == stack


def test_a_variable_brings_no_yaml_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVIL", "1GiB\n    pin: true\n  - type: memory")
    text = "version: 1\ntiers:\n  - type: host\n    capacity: ${EVIL}\n"
    assert message(text, "s") == (
        r"s:4: tiers[0].capacity: '1GiB\n    pin: true\n  - type: memory': "
        "expected a size such as 512MiB, 8GiB or 5GB"
    )


def test_a_part_of_a_text_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS", "cache.local")
    tier: Any = parse_stack(acme(url="redis://${REDIS}:${PORT_NOT_SET:-6379}/0")).secondary[0]
    assert tier.url == "redis://cache.local:6379/0"


@pytest.mark.parametrize("bad", ["${", "${}", "${1A}", "a${A-b}c", "${A:=b}", "${A"])
def test_what_begins_like_a_reference_and_is_none(bad: str) -> None:
    assert message(acme(url=bad), "x") == "x: tiers[1].url: '${' must begin ${NAME} or ${NAME:-default}"


def test_every_missing_variable_of_a_text_is_named() -> None:
    assert message(acme(url="${NOT_B}/${NOT_A}/${NOT_C:-c}"), "x") == (
        "x: tiers[1].url: the environment variables NOT_A, NOT_B are not set; set it, or give a default: "
        "${NOT_A:-default}"
    )


def test_a_variable_that_is_not_utf8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTES", "\udcff")
    assert message(acme(url="${BYTES}"), "x") == "x: tiers[1].url: is not UTF-8 text"


# --- secrets


@pytest.mark.parametrize(
    "settings",
    [
        {"password": "hunter2"},
        {"password": 12345},
        {"password": "${HOME:-hunter2}"},
        {"password": "a${HOME}"},
        {"token": "hunter2"},
        {"secret_access_key": "hunter2"},
        {"apiKey": "hunter2"},
        {"url": "redis://user:hunter2@host:6379/0"},
        {"url": "redis://:hunter2@host"},
        {"url": "redis://host/0?db=1&password=hunter2"},
        {"url": "${HOME:-redis://u:hunter2@host}"},
        {"nodes": ["redis://${U:-u}:hunter2@host"]},
        {"password": "${UNSET_SECRET}", "pasword": "hunter2"},
        {"password": {"hunter2": "hunter2"}},
        {"password": ["hunter2", 12345]},
    ],
)
def test_a_literal_secret_is_an_error_that_does_not_repeat_it(settings: dict[str, Any]) -> None:
    data = acme(**settings)
    for given in (data, yaml.safe_dump(data)):
        found = message(given)
        assert "hunter2" not in found
        assert "12345" not in found


def test_secrets_from_the_environment_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PW", "hunter2")
    monkeypatch.setenv("URL", "redis://me:hunter2@host/0")
    stack = parse_stack(acme(password="${PW}", token="${PW}", url="${URL}", nodes=["redis://a:${PW}@b"]))
    tier: Any = stack.secondary[0]
    assert tier.password.get_secret_value() == tier.token == "hunter2"
    assert tier.url == "redis://me:hunter2@host/0"
    for shown in (repr(stack), str(stack), repr(tier), str(tier), resolved(stack)):
        assert "hunter2" not in shown
    assert pickle.loads(pickle.dumps(stack)) == stack


def test_a_secret_that_does_not_fit_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PW", "hunter2")
    monkeypatch.setenv("URL", "redis://me:hunter2@host/0")
    data = acme(name="${URL}", shelves="${URL}", password=["${PW}"])
    found = message(data, "x")
    assert "hunter2" not in found
    assert found.count("\n") == 2
    with pytest.raises(ValidationError) as caught:
        StackSettings.model_validate({"version": 1, "tiers": (), "password": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_names_that_only_look_like_secrets_are_fine() -> None:
    parse_stack(acme(password_file="/run/secrets/redis", url="https://host/a:b@c?tokens=1"))
    assert "unknown key" in message(acme(tokens_per_block=16))


# --- the result


def test_a_third_party_brings_its_own_settings() -> None:
    stack = parse_stack(acme(shelves=3, nodes=["a", "b"]))
    tier: Any = stack.secondary[0]
    assert (tier.name, tier.shelf, tier.shelves, tier.nodes) == ("acme", Path("/shelf"), 3, ("a", "b"))


def test_yaml_and_a_mapping_give_the_same() -> None:
    text = """\
        version: 1
        tiers:
          - type: host
            capacity: 1GiB
          - type: acme
            shelf: /shelf
            deadline: 1500ms
        """
    assert parse_stack(dedent(text)) == parse_stack(acme(deadline="1.5s"))


def test_scalars_are_read_as_in_yaml_1_2() -> None:
    """`no`, `on`, times and dates are text: the traps of YAML 1.1 are not set."""
    for written in ("no", "on", "12:30", "2026-01-31", "1_000", "0o17"):
        text = f"version: 1\nnamespace: {written}\ntiers:\n  - type: host\n    capacity: 1GiB\n"
        assert parse_stack(text).namespace == written


def test_the_resolved_stack_loads_again_to_the_same() -> None:
    data = acme(deadline="1234567us", queue=0.3) | {"namespace": "7", "log_every": "0s"}
    data["tiers"][0] = {"type": "host", "capacity": 5368709121, "name": "ram"}
    stack = parse_stack(data)
    text = resolved(stack)
    assert parse_stack(text) == stack
    assert "capacity: 5368709121B" in text
    assert "log_every: 0s" in text


def test_settings_can_not_be_changed() -> None:
    stack = parse_stack(acme())
    with pytest.raises(ValidationError):
        stack.namespace = "x"  # type: ignore[misc]


def test_a_directory_of_one_engine_moves_down_what_it_evicts() -> None:
    host = {"type": "host", "capacity": "8GiB"}
    alone = {"type": "fs", "path": "/mnt/kvcascade", "capacity": "1GiB", "exclusive": True}
    below = {"type": "acme", "shelf": "/shelf", "write": "on_evict"}
    assert parse_stack({"version": 1, "tiers": [host, alone, below]}).secondary[1].write == "on_evict"
