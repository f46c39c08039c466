"""Input devices of an operator: SpaceMouse, gamepad, keyboard, foot pedal, GELLO and ALOHA's leader arms."""
