"""Which endpoints can be registered, which secrets they may name, how a body is signed, and the settings for that."""

import hashlib
import hmac
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.rewarder.endpoints.outgoing_request import OutgoingRequests
from services.rewarder.endpoints.spec import EndpointSpec, why_no_name
from services.rewarder.endpoints.transport.http_exchange import HttpExchange
from services.rewarder.endpoints.transport.outbound_rules import OutboundRules, parse_hosts, target
from services.rewarder.endpoints.transport.pinned_network import PinnedNetwork
from services.rewarder.endpoints.transport.secret_files import SecretError, SecretFiles, redacted
from services.rewarder.endpoints.transport.signing import signature_headers
from services.rewarder.settings import RewarderSettings

pytestmark = pytest.mark.unit


def spec(**fields: Any) -> EndpointSpec:
    return EndpointSpec.model_validate({"url": "https://judge.example/", **fields})


def test_the_version_is_of_what_was_set() -> None:
    assert spec().version == spec(timeout_s=30.0, headers={}).version
    versions = {
        made.version
        for made in (spec(), spec(timeout_s=31.0), spec(url="https://judge.example/2"), spec(wire_format="trl"))
    }
    assert len(versions) == 4
    assert EndpointSpec.model_validate_json(spec(batch_size=3).model_dump_json()) == spec(batch_size=3)


def test_headers_are_lower_case_and_name_their_secrets() -> None:
    made = spec(
        headers={"Authorization": {"secret": "judge-key", "prefix": "Bearer "}, "X-Team": "a"}, signing_secret="h"
    )
    assert list(made.headers) == ["authorization", "x-team"]
    assert made.secret_names == ["judge-key", "h"]


@pytest.mark.parametrize("name", ["judge", "a", "0", "my-judge_2", "a" * 64])
def test_ordinary_names_are_taken(name: str) -> None:
    assert why_no_name(name) is None


@pytest.mark.parametrize("name", ["", "Judge", "-judge", "_a", "a:b", "a/b", "a b", "a" * 65, "jüdge", "a\n"])
def test_other_names_are_not(name: str) -> None:
    assert str(why_no_name(name)).startswith("an endpoint's name has lower-case letters")


def test_a_secret_is_a_line_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "judge-key").write_text("sk-12345678\n")
    assert SecretFiles(tmp_path).read("judge-key", host="judge.example", port=443) == "sk-12345678"
    (tmp_path / "judge-key").write_text("sk-rotated-1")
    assert SecretFiles(tmp_path).read("judge-key", host="judge.example", port=443) == "sk-rotated-1"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "must be one line of at least 8 printable"),
        (b"short", "must be one line of at least 8 printable"),
        (b"two\r\nlines-of-it", "must be one line of at least 8 printable"),
        (b"\xff\xfe\x00binary-key", "must be one line of at least 8 printable"),
        ("schlüssel-umlaut".encode(), "must be one line of at least 8 printable"),
        (b"x" * 9000, "more than 8192 bytes"),
        (None, "there is no secret 'judge-key'"),
    ],
)
def test_a_secret_that_no_header_can_carry_is_refused_and_not_shown(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    if content is not None:
        (tmp_path / "judge-key").write_bytes(content)
    with pytest.raises(SecretError, match=why) as error:
        SecretFiles(tmp_path).read("judge-key", host="judge.example", port=443)
    assert not content or content.decode("latin-1")[:5] not in str(error.value)


@pytest.mark.parametrize("name", ["../judge-key", "/etc/passwd", "..", ".hidden", "a/b", "", "a" * 200])
def test_a_secret_is_never_outside_its_directory(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "judge-key").write_text("sk-12345678")
    with pytest.raises(SecretError, match="a secret is named with letters"):
        SecretFiles(inside).read(name, host="judge.example", port=443)
    with pytest.raises(SecretError, match="HEADRACE_REWARD_SECRETS_DIR of the rewarder is not set"):
        SecretFiles(None).read("judge-key", host="judge.example", port=443)


def test_a_secret_may_be_limited_to_some_hosts(tmp_path: Path) -> None:
    (tmp_path / "judge-key").write_text("sk-12345678")
    (tmp_path / "judge-key.hosts").write_text("judge.example\n*.internal\n")
    secrets = SecretFiles(tmp_path)
    for host in ("judge.example", "rm.internal"):
        assert secrets.read("judge-key", host=host, port=443)
    for host in ("evil.example", "judge.example.evil.example", "internal"):
        with pytest.raises(
            SecretError,
            match=f"may not be sent to {host} at port 443: judge-key.hosts does not list it",
        ):
            secrets.read("judge-key", host=host, port=443)
    (tmp_path / "judge-key.hosts").write_text("judge.internal:8443")
    assert secrets.read("judge-key", host="judge.internal", port=8443)
    with pytest.raises(SecretError, match=r"may not be sent to judge\.internal at port 9000"):
        secrets.read("judge-key", host="judge.internal", port=9000)
    (tmp_path / "judge-key.hosts").write_text("http://judge.example/")
    with pytest.raises(SecretError, match="has something that is not a host name"):
        secrets.read("judge-key", host="judge.example", port=443)


async def test_an_international_name_is_its_xn_form_everywhere(tmp_path: Path) -> None:
    (tmp_path / "judge-key").write_text("sk-12345678")
    (tmp_path / "judge-key.hosts").write_text("xn--jdge-0ra.example\nxn--i-7iq.ws\n")
    rules = OutboundRules(hosts=parse_hosts("xn--jdge-0ra.example"))
    exchange = HttpExchange(PinnedNetwork(rules, max_answer_bytes=1024), max_answer_bytes=1024)
    requests = OutgoingRequests(exchange, rules=rules, secrets=SecretFiles(tmp_path))
    header = {"authorization": {"secret": "judge-key"}}
    for url in ("https://xn--i-7iq.ws/", "http://xn--jdge-0ra.example/"):  # the first one cannot be decoded
        found = requests.check(EndpointSpec.model_validate({"url": url, "headers": header}))
        assert f"{found.scheme}://{target(found)[0]}/" == url
    await exchange.aclose()


def test_secrets_are_taken_out_of_text_also_where_json_has_escaped_them() -> None:
    secrets = ('pa"ss\\word', "sk-12345678")
    text = r'{"key": "pa\"ss\\word", "other": "sk-12345678"} pa"ss\word'
    assert redacted(text, secrets) == '{"key": "[secret]", "other": "[secret]"} [secret]'


def test_a_signature_can_be_checked_as_the_documentation_says() -> None:
    body = b'{"items": []}'
    headers = signature_headers(body, secret="hmac-secret", at_s=1795174943.9)
    expected = hmac.new(b"hmac-secret", b"1795174943." + body, hashlib.sha256).hexdigest()
    assert headers == {"x-headrace-timestamp": "1795174943", "x-headrace-signature": f"v1={expected}"}
    # Computed by another implementation: printf '1795174943.{"items": []}' | openssl dgst -sha256 -hmac hmac-secret
    assert expected == "126769e576cb7964aaaf9402fbd5d4227ca16599996fef647280820f52dc1646"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("reward_allowed_hosts", "http://judge", "'http://judge' is not a host"),
        ("reward_allowed_networks", "x", "'x' is not a network"),
        ("reward_allowed_ports", "http", "'http' is not a port"),
        ("reward_secrets_dir", "/no/such", "/no/such is not a directory"),
        ("reward_ca_file", "/dev/null", "/dev/null does not hold certificates"),
        ("reward_limits", '{"acuracy_reward": {}}', "Did you mean 'accuracy_reward'"),
        ("reward_limits", '{"judge": {}}', "'judge' is not a built-in reward.*an endpoint has its limits"),
        ("reward_limits", '{"os.path:no such": {}}', "'os.path:no such' is not of the form 'package.module:function'"),
        ("reward_ca_file", "/no/such", "/no/such does not hold certificates"),
    ],
)
def test_a_wrong_setting_is_a_sentence(field: str, value: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewarderSettings.model_validate({field: value})


def test_settings_say_where_endpoints_may_be() -> None:
    rules = RewarderSettings.model_validate(
        {"reward_allowed_hosts": "judge.internal:*", "reward_allowed_networks": "10.0.0.0/8"}
    ).outbound_rules()
    assert rules.parse("http://judge.internal:5000/")
    assert rules.is_named_by_operator("10.1.2.3", 80)
    assert not rules.is_named_by_operator("judge.example", 80)
