"""The stages put together: from a request to a result, under a budget.

The nodes, the shell and the benchmarks all call these functions; there is no other path.
"""

from .decode import BLENDED, DecodeReport, DecodeRequest, decode_to_mp4, meter_for, plan_for

__all__ = ["BLENDED", "DecodeReport", "DecodeRequest", "decode_to_mp4", "meter_for", "plan_for"]
