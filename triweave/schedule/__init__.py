"""Pipeline schedules as data: built, proved, priced and drawn. The trainer runs what was proved here.

schedule = build_schedule("1f1b", pp=4, vpp=1, num_micro_batches=8)
assert check_schedule(schedule) == []
timeline = simulate(schedule, cost=lambda action: 1e-3)
print(draw_timeline(timeline))
"""

from triweave.schedule.actions import Action, Kind, PipelineSchedule
from triweave.schedule.build import build_schedule, schedule_problems
from triweave.schedule.check import InFlight, check_schedule, in_flight, peak_held
from triweave.schedule.dataflow import Channel, Message, Payload, Result, channels, makes, needs, receives, sends
from triweave.schedule.draw import draw_timeline
from triweave.schedule.simulate import Span, Timeline, simulate
from triweave.schedule.svg import draw_svg

__all__ = [
    "Action",
    "Channel",
    "InFlight",
    "Kind",
    "Message",
    "Payload",
    "PipelineSchedule",
    "Result",
    "Span",
    "Timeline",
    "build_schedule",
    "channels",
    "check_schedule",
    "draw_svg",
    "draw_timeline",
    "in_flight",
    "makes",
    "needs",
    "peak_held",
    "receives",
    "schedule_problems",
    "sends",
    "simulate",
]
