"""In place of draccus, which the product imports before LeRobot: see `lab_motors`."""

from support import lab_motors

lab_motors.install()
