"""What a model consists of and what it computes, in numbers and pictures: `tcnca inspect`."""
