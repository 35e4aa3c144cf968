"""Finding the heads that copy from the context, and the policy "best" that ranks by them."""

from kvpatch.calibration.choice import calibrate

__all__ = ["calibrate"]
