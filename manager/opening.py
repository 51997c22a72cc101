"""Opens a tier, or what stands in for it until it can be opened."""

import logging
from functools import partial

from kvcascade.configs.schema import SecondarySettings, SharedSettings
from kvcascade.errors import ConfigError, TierUnavailable
from kvcascade.tiers import OpenContext, Tier, TierSettings
from kvcascade.tiers.late import LateTier
from kvcascade.types import Capabilities

__all__ = ["open_now", "open_tier"]

logger = logging.getLogger("kvcascade")


def open_tier(settings: SecondarySettings, context: OpenContext, apart: bool = False) -> tuple[Tier, bool]:
    """The tier, or what stands in for it until it can be opened; and whether it is the latter.

    Args:
        apart: the engine was reset to weights without a name: the tier is opened in an epoch that nobody shares.

    Raises:
        ConfigError: it can never be opened like this.
    """
    try:
        return open_now(settings, context, apart), False
    except TierUnavailable as error:
        logger.warning("tier %r can't be opened now, and is tried again: %s", settings.name, error)
        return LateTier(partial(open_now, settings, context, apart), _capabilities(settings)), True


def open_now(settings: SecondarySettings, context: OpenContext, apart: bool = False) -> Tier:
    """As `open_tier`, without anything that stands in.

    Raises:
        ConfigError: it can never be opened like this.
        TierUnavailable: it can't be opened now.
    """
    if not isinstance(settings, TierSettings):
        raise ConfigError(f"type: {settings.type!r} has settings that open no tier")
    tier = settings.open(context)
    if apart:
        try:
            tier.move_to("")
        except BaseException:
            tier.close()
            raise
    return tier


def _capabilities(settings: SecondarySettings) -> Capabilities:
    """Those of a tier that is not open yet, as far as its settings tell."""
    if isinstance(settings, SharedSettings) and not getattr(settings, "exclusive", False):
        return Capabilities(persistent=True, shared=True)
    return Capabilities(persistent=True, bounded=getattr(settings, "capacity", None) is not None)
