"""The names that users import from `serl_chunk_robot`. `__init__.py` reads this table."""

from serl_chunk_robot.client.client import RobotClient as RobotClient
from serl_chunk_robot.devices.base import InputDevice as InputDevice
from serl_chunk_robot.drivers.base import Driver as Driver
from serl_chunk_robot.drivers.base import DriverSpec as DriverSpec
from serl_chunk_robot.drivers.base import Reading as Reading
from serl_chunk_robot.drivers.camera import Camera as Camera
from serl_chunk_robot.robot_file.opening import open_robot as open_robot

__version__: str
