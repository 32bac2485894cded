"""The errors that a request which was understood may end in: what its client reads, and how to cure it."""

from __future__ import annotations

from gateway.errors import ApiError
from gateway.failures import AttemptFailed
from gateway.keys import Principal
from scheduler.decision import Decision, Reason

RETRY_AFTER_S = 1.0
_CURES = {
    Reason.NO_DECODE_NODE: "no decode node accepts work; start one with `prfaas node --role decode`",
    Reason.HINTED_CLUSTER_UNAVAILABLE: "the hinted cluster has no prefill node that accepts work",
    Reason.OVERLOADED: "all nodes are full; add nodes, or try again later",
    Reason.RESIDENCY: "this key's prompts may not be where this gateway decodes; set its region with "
    "`prfaas clusters set`, or use a gateway there",
}


def no_model(name: str) -> ApiError:
    """Nobody tells whether it is there from those who may not use it."""
    text = f"the model {name[:80]!r} does not exist, or this key may not use it"
    return ApiError(404, text, param="model", code="model_not_found")


def no_role(principal: Principal) -> ApiError:
    """Its key is for other things than generating."""
    return ApiError(403, f"a key with role {principal.role} may not generate", code="role_forbidden")


def no_way(decision: Decision) -> ApiError:
    """Nothing was chosen."""
    word = decision.reason.value
    if decision.reason is Reason.RESIDENCY:
        return ApiError(403, _CURES[decision.reason], code=word)
    return ApiError(503, _CURES[decision.reason], code=word, retry_after_s=RETRY_AFTER_S)


def failed(what: str, failure: AttemptFailed) -> ApiError:
    """The nodes failed; ``what`` says in which try."""
    text = f"{what}: {failure.stage}: {failure.cause}"
    return ApiError(503, text, code=failure.cause, retry_after_s=RETRY_AFTER_S)


def over_budget(route: str, failure: AttemptFailed, retry_after_s: float) -> ApiError:
    """The fallback would cost more than all fallbacks may."""
    why = f"{failure.stage}: {failure.cause}"
    return ApiError(
        503,
        f"the {route} way failed ({why}) and the budget for prefilling at home is spent",
        code="fallback_budget_exhausted",
        retry_after_s=retry_after_s,
    )


def no_time(limit_s: float) -> ApiError:
    """What comes after all other work would come too late."""
    text = f"all nodes are full: an answer would come later than the {limit_s:g} s that a request may take"
    return ApiError(503, text, code=Reason.OVERLOADED.value, retry_after_s=RETRY_AFTER_S)


def too_late(limit_s: float) -> ApiError:
    """The request's own deadline passed."""
    return ApiError(504, f"no answer within {limit_s:g} s", code="request_timeout")
