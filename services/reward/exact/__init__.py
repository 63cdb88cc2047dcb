"""What an answer is: found in a response, brought to one spelling, read as a value, compared. Pure, without sympy."""
