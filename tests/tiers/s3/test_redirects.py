"""Where an answer may send a request, with its signature, its token and its payload."""

import pytest

from kvcascade.tiers.s3.messages import Answer, Request
from kvcascade.tiers.s3.redirects import followed
from kvcascade.tiers.s3.signing import Terms

REQUEST = Request("PUT", "a/b~c")


def leads_to(base: str, home: str, location: str) -> str | None:
    answer = Answer(307, {"location": location + "?x=y"})
    terms = followed(Terms(base, "eu-west-1", "s3", None), REQUEST, answer, home)
    return None if terms is None else terms.base


@pytest.mark.parametrize(
    "host",
    [
        "kv.s3.eu-west-2.amazonaws.com",
        "kv.s3-us-west-2.amazonaws.com",
        "kv.s3.dualstack.us-gov-west-1.amazonaws.com",
        "kv.s3-fips.us-east-1.amazonaws.com",
        "kv.s3.amazonaws.com",
    ],
)
def test_hosts_of_s3(host: str) -> None:
    base, home = "https://kv.s3.eu-west-1.amazonaws.com/", "s3.eu-west-1.amazonaws.com"
    assert leads_to(base, home, f"https://{host}/a/b~c") == f"https://{host}/"
    assert leads_to(base, home, f"http://{host}/a/b~c") is None


@pytest.mark.parametrize(
    "host",
    [
        "kv.example.com",
        "amazonaws.com",
        "s3.amazonaws.com.example.com",
        "example.com:443",
        "x-1.eu-west-1.elb.amazonaws.com",
        "s3-x-1.eu-west-1.elb.amazonaws.com",
        "ec2-1-2-3-4.compute-1.amazonaws.com",
        "xs3.amazonaws.com",
        "s3.amazonaws.com@example.com",
        "user@kv.s3.amazonaws.com",
        "169.254.169.254",
        "[::1",
        "kv.s3.amazonaws.com:99999",
        "",
    ],
)
def test_hosts_of_anybody(host: str) -> None:
    base, home = "https://kv.s3.eu-west-1.amazonaws.com/", "s3.eu-west-1.amazonaws.com"
    assert leads_to(base, home, f"https://{host}/a/b~c") is None


@pytest.mark.parametrize(
    ("location", "found"),
    [
        ("http://minio.local:9001/kv/a/b~c", "http://minio.local:9001/kv/"),
        ("http://node1.minio.local:9000/kv/a/b~c", "http://node1.minio.local:9000/kv/"),
        ("http://xminio.local:9000/kv/a/b~c", None),
        ("http://local:9000/kv/a/b~c", None),
        ("https://minio.local:9000/kv/a/b~c", None),
        ("http://kv.s3.amazonaws.com/a/b~c", None),
        ("http://minio.local:9000/kv/other", None),
        ("http://minio.local:9000/kv/\r\nX: y/a/b~c", None),
        ("/kv/a/b~c", None),
    ],
)
def test_hosts_of_a_store_of_ones_own(location: str, found: str | None) -> None:
    assert leads_to("http://minio.local:9000/kv/", "minio.local", location) == found
