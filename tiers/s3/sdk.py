"""What botocore decides: whose credentials, which endpoint and region, and how that is corrected when a store's
answer shows that it is wrong."""

import ssl
import threading
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.httpsession import get_cert_path

from kvcascade.errors import ConfigError, TierUnavailable

from . import redirects
from .failures import of_credentials
from .messages import Answer, Request
from .signing import Terms, frozen

if TYPE_CHECKING:
    from .settings import S3Settings

__all__ = ["Sdk"]

_DEFAULT_REGION = "us-east-1"
_AWS = (".amazonaws.com", ".amazonaws.com.cn")
_STALE = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired"}
_UNKNOWN = {"InvalidAccessKeyId", "SignatureDoesNotMatch"}
_SKEWED = 240.0
"""Seconds by which a clock that is wrong explains a refusal; stores allow 900."""


class Sdk:
    """botocore for one bucket, with a session of its own.

    `terms` are what requests are signed by now. Thread-safe: `_lock` covers their replacement, with the I/O that
    new credentials may need.
    """

    def __init__(self, settings: "S3Settings") -> None:
        """
        Raises:
            ConfigError: no credentials are found, or the configuration that botocore finds can't be used.
            TierUnavailable: who gives the credentials can't now.
        """
        self._settings = settings
        self._lock = threading.Lock()
        try:
            self._session = botocore.session.Session()
            region = settings.region or self._session.get_config_variable("region") or _DEFAULT_REGION
            base, service = self._endpoint(region)
            credentials = self._session.get_credentials()
        except (BotoCoreError, ValueError, OSError) as error:
            raise ConfigError(f"boto3's configuration can't be used: {error}") from error
        except (ClientError, RuntimeError) as error:
            raise of_credentials(error) from error
        if credentials is None:
            raise ConfigError(
                "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the "
                "machine a role; boto3's own chain is asked"
            )
        self.terms = Terms(base, region, service, credentials, sign_payload=self._signs_payload)
        self.tls = self._trusted() if base.startswith("https:") else None

    @property
    def checksums(self) -> bool:
        """Whether the SDK's integrity headers are sent."""
        if self._settings.checksum == "auto":
            aws = self.terms.origin.host.endswith(_AWS)
            return aws and self._client_config.request_checksum_calculation != "when_required"
        return self._settings.checksum

    def revised(self, used: Terms, request: Request, answer: Answer) -> Terms | None:
        """The terms under which the same request may be answered better; None where there are none. Asked once for
        each kind of trouble, at most."""
        with self._lock:
            if self.terms is not used and self.terms.base == used.base:
                return self.terms  # another thread has learned something meanwhile
            if (moved := redirects.followed(used, request, answer, self._home)) is not None:
                return moved
            revised = self._corrected(used, answer)
            if revised is not None:
                self.terms = revised
            return revised

    def _corrected(self, used: Terms, answer: Answer) -> Terms | None:
        if answer.region and answer.region != used.region and answer.status in (301, 307, 400, 403):
            return self._in_region(used, answer.region)
        if answer.status not in (400, 403):
            return None
        skew = _skew(answer)
        if skew is not None and abs(skew - used.skew) > _SKEWED:
            return used._replace(skew=skew)
        if answer.code in _STALE | _UNKNOWN:
            return self._renewed(used)
        if not used.sign_payload and _demands_digest(answer):
            return used._replace(sign_payload=True)
        return None

    def _in_region(self, used: Terms, region: str) -> Terms | None:
        try:
            base, service = self._endpoint(region)
        except (BotoCoreError, ValueError):
            return None  # it is none
        return used._replace(base=base, region=region, service=service)

    def _renewed(self, used: Terms) -> Terms | None:
        """With what the chain finds now: credentials in a file or a variable may have been replaced."""
        try:
            credentials = botocore.session.Session().get_credentials()
            if credentials is None or frozen(credentials) == frozen(used.credentials):
                return None
        except (BotoCoreError, ClientError, RuntimeError, ValueError, OSError, TierUnavailable):
            return None
        return used._replace(credentials=credentials)

    def forked(self) -> None:
        """In a fork, where the parent's locks may be held for ever."""
        self._lock = threading.Lock()
        self._session = botocore.session.Session()
        self.terms = self.terms._replace(credentials=_Anew())

    # -- botocore

    def _endpoint(self, region: str) -> tuple[str, str]:
        """URL of the bucket, and the name of the service that signatures are for: asked by a request that is not
        sent."""
        client = self._client(region)
        client.meta.events.register("before-sign.s3.HeadObject", _catch)
        try:
            client.head_object(Bucket=self._settings.bucket, Key="x")
        except _Caught as caught:
            return caught.url.removesuffix("x"), caught.service
        raise ConfigError("this version of botocore is not known: it has sent what it was only asked to prepare")

    def _client(self, region: str) -> Any:
        style = self._settings.addressing_style
        s3: Any = {"addressing_style": style} if style != "auto" else None
        client = self._session.create_client(
            "s3", region, endpoint_url=self._settings.endpoint_url, config=Config(signature_version="s3v4", s3=s3)
        )
        self._client_config: Any = client.meta.config
        self._home: str = urlsplit(client.meta.endpoint_url).hostname or ""
        return client

    @property
    def _signs_payload(self) -> bool:
        return bool((self._client_config.s3 or {}).get("payload_signing_enabled"))

    def _trusted(self) -> ssl.SSLContext:
        """Whom to trust: the bundle that boto3 is told to use, else its own and the system's."""
        bundle = self._session.get_config_variable("ca_bundle")
        try:
            context = ssl.create_default_context(cafile=bundle)
            if bundle is None:
                context.load_verify_locations(get_cert_path(True))
        except OSError as error:
            raise ConfigError(f"the CA bundle {bundle} can't be used: {error}") from error
        return context


class _Anew:
    """Credentials that are looked for when they are first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: Any = None

    def get_frozen_credentials(self) -> Any:
        with self._lock:
            if self._found is None:
                self._found = botocore.session.Session().get_credentials()
            if self._found is None:
                raise ValueError("boto3's own chain finds none")
        return self._found.get_frozen_credentials()


class _Caught(Exception):
    """A request that botocore was about to sign."""

    def __init__(self, url: str, service: str) -> None:
        super().__init__(url)
        self.url = url
        self.service = service


def _catch(request: Any, signing_name: str, **_: Any) -> NoReturn:
    raise _Caught(request.url, signing_name)


def _skew(answer: Answer) -> float | None:
    """Seconds by which the store's clock is ahead, as its answer says."""
    try:
        return parsedate_to_datetime(answer.fields["date"]).timestamp() - time.time()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _demands_digest(answer: Answer) -> bool:
    said = answer.message.lower()
    return answer.code == "XAmzContentSHA256Mismatch" or "content-sha256" in said or "unsigned" in said
