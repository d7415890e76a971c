// What is wider than the page can be scrolled from the keyboard.
function makeReachable() {
  for (const wide of document.querySelectorAll("pre > code")) {
    if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
    else wide.removeAttribute("tabindex");
  }
}
makeReachable();
window.addEventListener("load", makeReachable);
window.addEventListener("resize", makeReachable);

// A copy button of a console copies its commands, neither prompts nor what is printed.
function commandsOf(code) {
  const commands = code.cloneNode(true);
  for (const other of commands.querySelectorAll(".gp, .go")) other.remove();
  return commands.textContent.split("\n").filter((line) => line.trim()).join("\n");
}
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-clipboard-target]");
  const code = button && document.querySelector(button.dataset.clipboardTarget);
  if (code?.querySelector(".gp")) button.dataset.clipboardText = commandsOf(code);
}, true);
